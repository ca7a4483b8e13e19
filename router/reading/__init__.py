"""From a request's bytes to the facts needed to choose a pod."""
