"""Builders of networks: a module for each kind of source, and the parts that these share.

Kinds: `applications`, `keras_cv_models`, `keras_hub_models`, `kaggle`, `built_in`, `noop`, and for files `keras_file`
(`.keras`, `.h5`), `saved_model`, `graph_file` (`.pb`), `jax_file` and `onnx_tflite` (`.onnx`, `.tflite`).
`config.sources` recognises a kind by its prefix or suffix, and has the facts that are known before a load; `catalog`
calls the builder. `file_content` refuses files that are damaged, and with `content_kinds` those that are misnamed.
"""
