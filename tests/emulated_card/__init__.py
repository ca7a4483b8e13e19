"""A CUDA card for machines without one: torch's face of it over the CPU, with streams that run as late as they may."""
