"""The search for the highest load that a server keeps up with: steps, saturation, curves."""
