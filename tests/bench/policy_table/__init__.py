"""The policy table: every router on every workload, over seeds, with the bounds that `predicted_ttft` must keep."""
