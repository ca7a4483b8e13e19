"""The gateway's HTTP side: read a request, choose a pod, pass its answer on."""
