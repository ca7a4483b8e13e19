"""What happens when there are more requests than the pods can take. Pure: no I/O, no clock, no asyncio."""
