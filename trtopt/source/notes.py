"""What an ONNX model says about itself and computes nothing."""

from __future__ import annotations

from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import ModelProto

_NAME = "graph"
_NOTES = ("doc_string", "metadata_props", "denotation")
_OF_THE_MODEL = ("producer_name", "producer_version", "domain", "model_version")


def clear_notes(proto: ModelProto) -> None:
    """Take doc strings, metadata and denotations out of ``proto``, subgraphs and functions included; its producer too.

    The main graph gets a fixed name, since a graph has to have one. Names of nodes and values stay: layers of an engine
    are called by them.
    """
    for name in _OF_THE_MODEL:
        proto.ClearField(name)
    _clear(proto)
    proto.graph.name = _NAME


def _clear(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name in _NOTES:
            message.ClearField(field.name)
        elif field.message_type is None:
            continue
        elif isinstance(value, Message):
            _clear(value)
        else:
            for item in value:
                _clear(item)
