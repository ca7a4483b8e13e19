"""Charts of a Result, each described once, drawn as SVG or PNG. They import matplotlib, so import them late."""
