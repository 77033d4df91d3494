from __future__ import annotations

from xlaserve.wire.grpc.reflection_service import REFLECTIONS


def test_both_versions_of_reflection_have_the_same_fields() -> None:
    v1, v1alpha = REFLECTIONS
    assert [v1.full_name, v1alpha.full_name] == [
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ]
    for one, other in zip(v1.methods, v1alpha.methods, strict=True):
        assert (one.name, one.client_streaming, one.server_streaming) == (other.name, True, True)
        for message, alpha in ((one.input_type, other.input_type), (one.output_type, other.output_type)):
            fields = [(field.name, field.number, field.type) for field in message.fields]
            assert fields == [(field.name, field.number, field.type) for field in alpha.fields]
