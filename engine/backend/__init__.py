"""What runs a step: torch on a device, or an emulated device."""
