"""HTTP in front of the fleet: read a request, choose a pod, copy the answer through."""
