"""What the machine can carry: GPUs as NVML sees them, and what a checkpoint needs of them."""
