"""Plans in the formats of training frameworks: torchtitan, Megatron-LM, DeepSpeed, PyTorch."""
