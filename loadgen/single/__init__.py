"""One server under load: opened once, loaded one or more times, measured each time; and the result of one load."""
