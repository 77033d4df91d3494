"""Models of torchvision, each exported, imported and compared with PyTorch: `python -m scripts.torchvision_models`."""
