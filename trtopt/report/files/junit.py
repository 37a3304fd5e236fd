"""A check as JUnit XML: a test case for each gate, so that a CI system shows which failed.

The elements and attributes are those that Jenkins' xUnit plugin (``junit-10.xsd``) and GitLab's and GitHub's readers
have in common. The standard library writes it: junitparser, the maintained alternative, wraps the same elements.
"""

from __future__ import annotations

from xml.etree import ElementTree

from trtopt.report.schema.check import CheckReport, Gate
from trtopt.report.text import check as words
from trtopt.report.text.analysis import visible

_SUITE = "trtopt check"


def junit_xml(found: CheckReport) -> str:
    """The check as an XML document. A gate that was not judged is a skipped test."""
    skipped = sum(gate.verdict == "not judged" for gate in found.gates)
    counts = {"tests": str(len(found.gates)), "failures": str(len(found.failed)), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **counts, "skipped": str(skipped), "time": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    for name, checked in (("report", found.subject), ("baseline", found.baseline)):
        if checked is not None:
            ElementTree.SubElement(properties, "property", {"name": name, "value": words.about(checked)})
    for gate in found.gates:
        names = {"classname": f"trtopt.check.{gate.name.partition(':')[0]}", "name": visible(gate.title), "time": "0"}
        _result(ElementTree.SubElement(suite, "testcase", names), gate)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _result(case: ElementTree.Element, gate: Gate) -> None:
    if gate.verdict == "passed":
        return
    message = visible(gate.reason)
    if gate.verdict == "not judged":
        ElementTree.SubElement(case, "skipped", {"message": message})
        return
    failure = ElementTree.SubElement(case, "failure", {"type": "gate", "message": message})
    figures = [("before", words.figure(gate.before, gate.unit)), ("now", words.figure(gate.after, gate.unit))]
    lines = [f"{name}: {value}" for name, value in (*figures, ("limit", words.limit(gate))) if value]
    rows = words.layer_rows(gate.layers, 80)
    lines += ["  ".join(cells) for cells in rows.cells]
    failure.text = "\n".join([message, *lines])
