"""ONNX and TFLite files: OpenVINO reads them, and its operations are rewritten as TensorFlow's for the other modes.

`onnx_tflite_file` makes the network. `openvino_to_tensorflow` rewrites, by the tables of `openvino_operations`,
`openvino_shapes` and `openvino_windows`.
"""
