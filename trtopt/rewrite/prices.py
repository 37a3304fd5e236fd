"""A judge that is asked once for models of equal structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.errors import TrtoptError
from trtopt.graph import edit
from trtopt.rewrite.protocol import Judge, Priced
from trtopt.rewrite.region import structure_key


@dataclass
class Prices:
    """Remembers what a judge said, by structure; which node is which is told by their order.

    Attributes:
        judge: Says what a model costs.
    """

    judge: Judge
    _known: dict[str, Priced | TrtoptError] = field(default_factory=dict)

    def of(self, model: ir.Model, *, inner: bool) -> Priced:
        """As :meth:`~trtopt.rewrite.protocol.Judge.price`."""
        names = [str(node.name) for node in edit.all_nodes(model.graph)]
        return self.remembered(f"{structure_key(model)} {inner}", names, lambda: model, inner=inner)

    def remembered(self, key: str, names: Sequence[str], make: Callable[[], ir.Model], *, inner: bool) -> Priced:
        """The price under a key of the caller's own.

        Args:
            key: Equal for models that cost the same.
            names: Node names in an order that models of one key share; other nodes are left out of the kernels.
            make: Gives the model; called where the key is not known.
            inner: See the judge.

        Raises:
            TrtoptError: The judge raised it for the first model of this key.
        """
        if key not in self._known:
            try:
                priced = self.judge.price(make(), inner=inner)
            except TrtoptError as error:
                self._known[key] = error
            else:
                self._known[key] = _renamed(priced, {name: str(index) for index, name in enumerate(names)})
        found = self._known[key]
        if isinstance(found, TrtoptError):
            raise found
        return _renamed(found, {str(index): name for index, name in enumerate(names)})


def _renamed(priced: Priced, names: Mapping[str, str]) -> Priced:
    """With other node names; nodes that have none are left out."""
    kernels = ((frozenset(names[n] for n in nodes if n in names), moved, time) for nodes, moved, time in priced.kernels)
    return Priced(priced.total, tuple(kernels))
