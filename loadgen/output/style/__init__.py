"""How every report writes numbers and names, and its colours."""
