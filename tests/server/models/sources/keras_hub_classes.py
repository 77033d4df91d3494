"""Classes of KerasHub for tests: arguments that make them small, and presets that state their number of parameters."""

from __future__ import annotations

from typing import Any, Final

RESNET: Final = {
    "class": "ResNetBackbone",
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [7],
    "stackwise_num_filters": [64, 64, 64, 64],
    "stackwise_num_blocks": [1, 1, 1, 1],
    "stackwise_num_strides": [1, 2, 2, 2],
    "block_type": "basic_block",
}
MIT: Final = {
    "class": "MiTBackbone",
    "image_shape": "image_shape",
    "num_layers": 4,
    "hidden_dims": [8, 12, 16, 20],
    "layerwise_depths": [1, 1, 1, 1],
    "layerwise_num_heads": [1, 1, 2, 2],
    "layerwise_sr_ratios": [8, 4, 2, 1],
    "layerwise_patch_sizes": [7, 3, 3, 3],
    "layerwise_strides": [4, 2, 2, 2],
    "max_drop_path_rate": 0.0,
}
HGNET: Final = {
    "class": "HGNetV2Backbone",
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "stem_channels": [3, 8, 8],
    "hidden_act": "relu",
    "use_learnable_affine_block": True,
    "stackwise_stage_filters": [[8, 8, 8, 1, 2, 3], [8, 8, 16, 1, 2, 3], [16, 8, 16, 1, 2, 5], [16, 8, 32, 1, 2, 5]],
    "apply_downsample": [False, True, True, True],
    "use_lightweight_conv_block": [False, False, True, True],
}
VIT: Final = {
    "image_shape": "image_shape",
    "patch_size": [16, 16],
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
}
TINY: Final[dict[str, dict[str, Any]]] = {
    "ResNetImageClassifier": {"backbone": RESNET},
    "EfficientNetImageClassifier": {
        "backbone": {
            "class": "EfficientNetBackbone",
            "stackwise_width_coefficients": [1.0, 1.0],
            "stackwise_depth_coefficients": [1.0, 1.0],
            "stackwise_kernel_sizes": [3, 5],
            "stackwise_num_repeats": [1, 1],
            "stackwise_input_filters": [8, 8],
            "stackwise_output_filters": [8, 16],
            "stackwise_expansion_ratios": [1, 4],
            "stackwise_strides": [1, 2],
            "stackwise_block_types": ["v1", "v1"],
            "stackwise_squeeze_and_excite_ratios": [0.25, 0.25],
            "min_depth": None,
            "use_depth_divisor_as_min_depth": True,
            "cap_round_filter_decrease": True,
            "num_features": 32,
            "dropout": 0,
        }
    },
    "MobileNetImageClassifier": {
        "num_features": 32,
        "backbone": {
            "class": "MobileNetBackbone",
            "stackwise_num_blocks": [1, 1],
            "stackwise_expansion": [[16], [16]],
            "stackwise_num_filters": [[8], [16]],
            "stackwise_kernel_size": [[3], [5]],
            "stackwise_num_strides": [[2], [2]],
            "stackwise_se_ratio": [[None], [0.25]],
            "stackwise_activation": [["relu"], ["hard_swish"]],
            "stackwise_padding": [[1], [2]],
            "output_num_filters": 16,
            "depthwise_filters": 16,
            "depthwise_stride": 1,
            "depthwise_residual": True,
            "last_layer_filter": 32,
        },
    },
    "MobileNetV5ImageClassifier": {
        "head_hidden_size": 16,
        "backbone": {
            "class": "MobileNetV5Backbone",
            "stackwise_num_blocks": [1, 2],
            "stackwise_block_types": [["er"], ["uir", "mqa"]],
            "stackwise_num_filters": [[8], [16, 16]],
            "stackwise_strides": [[2], [2, 1]],
            "stackwise_act_layers": [["gelu"], ["gelu", "gelu"]],
            "stackwise_exp_ratios": [[2.0], [2.0, 0.0]],
            "stackwise_se_ratios": [[0.0], [0.0, 0.0]],
            "stackwise_dw_kernel_sizes": [[0], [5, 0]],
            "stackwise_dw_start_kernel_sizes": [[0], [3, 0]],
            "stackwise_dw_end_kernel_sizes": [[0], [0, 0]],
            "stackwise_exp_kernel_sizes": [[3], [0, 0]],
            "stackwise_pw_kernel_sizes": [[1], [0, 0]],
            "stackwise_num_heads": [[0], [0, 2]],
            "stackwise_key_dims": [[0], [0, 8]],
            "stackwise_value_dims": [[0], [0, 8]],
            "stackwise_kv_strides": [[0], [0, 2]],
            "stackwise_use_cpe": [[False], [False, False]],
            "num_features": 16,
            "msfa_output_resolution": 4,
            "layer_scale_init_value": 0.1,
        },
    },
    "ViTImageClassifier": {"backbone": {"class": "ViTBackbone", "mlp_dim": 32} | VIT},
    "DeiTImageClassifier": {"backbone": {"class": "DeiTBackbone", "intermediate_dim": 32} | VIT},
    "SwinTransformerImageClassifier": {
        "backbone": {
            "class": "SwinTransformerBackbone",
            "image_shape": "image_shape",
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [1, 2],
            "window_size": 4,
        }
    },
    "MiTImageClassifier": {"backbone": MIT},
    "CSPNetImageClassifier": {
        "backbone": {
            "class": "CSPNetBackbone",
            "stem_filters": 8,
            "stem_kernel_size": 3,
            "stem_strides": 1,
            "stem_padding": "same",
            "stackwise_depth": [1, 1],
            "stackwise_strides": [2, 2],
            "stackwise_num_filters": [8, 16],
            "bottle_ratio": [0.5, 1.0],
            "block_ratio": [1.0, 0.5],
            "expand_ratio": [2.0, 1.0],
            "stage_type": "csp",
            "block_type": "dark_block",
            "down_growth": True,
        }
    },
    "HGNetV2ImageClassifier": {"preprocessor": None, "backbone": HGNET},
    "DenseNetImageClassifier": {
        "backbone": {"class": "DenseNetBackbone", "stackwise_num_repeats": [1, 2], "growth_rate": 8}
    },
    "VGGImageClassifier": {
        "pooling_hidden_dim": 16,
        "backbone": {
            "class": "VGGBackbone",
            "image_shape": "image_shape",
            "stackwise_num_repeats": [1, 1],
            "stackwise_num_filters": [8, 16],
        },
    },
    "XceptionImageClassifier": {
        "backbone": {
            "class": "XceptionBackbone",
            "stackwise_conv_filters": [[8, 8], [16, 16], [16, 16, 16], [32]],
            "stackwise_pooling": [False, True, False, False],
        }
    },
    "RetinaNetObjectDetector": {
        "backbone": {
            "class": "RetinaNetBackbone",
            "image_encoder": RESNET,
            "min_level": 3,
            "max_level": 7,
            "use_p5": False,
        },
        # With normalized heads all boxes of random weights would lie beyond so small an image.
        "pre_logits_num_conv_layers": 1,
    },
    "DFineObjectDetector": {
        "backbone": {
            "class": "DFineBackbone",
            "image_shape": "image_shape",
            "anchor_image_size": "image_size",
            "backbone": HGNET | {"image_shape": "image_shape", "out_features": ["stage3", "stage4"]},
            "out_features": ["stage3", "stage4"],
            "decoder_in_channels": [16, 16],
            "encoder_hidden_dim": 16,
            "num_labels": "classes",
            "num_denoising": 0,
            "learn_initial_query": False,
            "num_queries": 10,
            "feat_strides": [16, 32],
            "num_feature_levels": 2,
            "hidden_dim": 16,
            "encoder_in_channels": [16, 32],
            "encode_proj_layers": [1],
            "num_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "num_encoder_layers": 1,
            "hidden_expansion": 0.34,
            "depth_multiplier": 0.5,
            "eval_idx": -1,
            "num_decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 16,
            "decoder_n_points": [1, 1],
            "lqe_hidden_dim": 8,
            "num_lqe_layers": 2,
            "seed": 1,
        }
    },
    "DeepLabV3ImageSegmenter": {
        "backbone": {
            "class": "DeepLabV3Backbone",
            "image_encoder": RESNET,
            "projection_filters": 8,
            "low_level_feature_key": "P2",
            "spatial_pyramid_pooling_key": "P5",
            "upsampling_size": 8,
            "dilation_rates": [6],
        }
    },
    "SegFormerImageSegmenter": {
        "backbone": {"class": "SegFormerBackbone", "image_encoder": MIT, "projection_filters": 16}
    },
    "BASNetImageSegmenter": {
        "backbone": {
            "class": "BASNetBackbone",
            "num_classes": "classes",
            "image_shape": "image_shape",
            "projection_filters": 64,
            "image_encoder": RESNET | {"stackwise_num_filters": [64, 128, 256, 512]},
        }
    },
}
STATED: Final = {
    "ResNetImageClassifier": "resnet_50_imagenet",
    "MobileNetImageClassifier": "mobilenet_v3_large_100_imagenet",
    "ViTImageClassifier": "vit_base_patch16_224_imagenet",
    "DeiTImageClassifier": "deit_small_distilled_patch16_224_imagenet",
    "SwinTransformerImageClassifier": "swin_tiny_patch4_window7_224",
    "DenseNetImageClassifier": "densenet_121_imagenet",
    "VGGImageClassifier": "vgg_16_imagenet",
    "XceptionImageClassifier": "xception_41_imagenet",
    "MobileNetV5ImageClassifier": "mobilenetv5_300m_enc_gemma3n",
    "RetinaNetObjectDetector": "retinanet_resnet50_fpn_v2_coco",
    "DFineObjectDetector": "dfine_nano_coco",
    "DeepLabV3ImageSegmenter": "deeplab_v3_plus_resnet50_pascalvoc",
}
"""Classes whose presets state how many parameters they have, as Keras counts them."""
