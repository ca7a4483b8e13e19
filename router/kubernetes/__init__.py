"""Pods and InferencePools as Kubernetes lists them."""
