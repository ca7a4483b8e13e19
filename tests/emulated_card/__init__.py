"""A CUDA card for machines without one: `torch.cuda` over the CPU, with streams that run as late as they may."""
