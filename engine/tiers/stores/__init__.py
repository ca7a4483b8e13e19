"""Where a tier's blocks lie: a file, a shared folder, or nowhere, for an emulated device."""
