from __future__ import annotations

from typing import Any

import pytest
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2, op_def_pb2
from tensorflow.core.protobuf import (
    meta_graph_pb2,
    saved_model_pb2,
    saved_object_graph_pb2,
    struct_pb2,
)

from xlaserve_proto import model_files_pb2 as pb

MESSAGES = [
    (pb.SavedModel, saved_model_pb2.SavedModel),
    (pb.MetaGraph, meta_graph_pb2.MetaGraphDef),
    (pb.MetaGraph.Info, meta_graph_pb2.MetaGraphDef.MetaInfoDef),
    (pb.Graph, graph_pb2.GraphDef),
    (pb.Node, node_def_pb2.NodeDef),
    (pb.Attribute, attr_value_pb2.AttrValue),
    (pb.FunctionLibrary, function_pb2.FunctionDefLibrary),
    (pb.Function, function_pb2.FunctionDef),
    (pb.Function.Signature, op_def_pb2.OpDef),
    (pb.ObjectGraph, saved_object_graph_pb2.SavedObjectGraph),
    (pb.Object, saved_object_graph_pb2.SavedObject),
    (pb.Object.User, saved_object_graph_pb2.SavedUserObject),
    (pb.Object.Variable, saved_object_graph_pb2.SavedVariable),
    (pb.Object.TracedFunction, saved_object_graph_pb2.SavedFunction),
    (pb.Object.BareFunction, saved_object_graph_pb2.SavedBareConcreteFunction),
    (pb.ConcreteFunction, saved_object_graph_pb2.SavedConcreteFunction),
    (pb.Structure, struct_pb2.StructuredValue),
    (pb.Structure.TensorSpec, struct_pb2.TensorSpecProto),
]


@pytest.mark.parametrize(("ours", "theirs"), MESSAGES)
def test_fields_have_tensorflows_numbers(ours: Any, theirs: Any) -> None:
    known = {field.name: (field.number, field.type) for field in theirs.DESCRIPTOR.fields}
    assert {field.name: (field.number, field.type) for field in ours.DESCRIPTOR.fields}.items() <= known.items()
