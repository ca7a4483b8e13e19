"""An emulated pod in virtual time, and what a router sees and decides of it."""
