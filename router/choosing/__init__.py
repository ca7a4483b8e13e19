"""The choice of a pod: match the keys, view the pods, ask the policy, remember the choice. Does no I/O."""
