"""Wait until a gateway has its engines: URL ENGINES SECONDS."""

import json
import sys
import time
import urllib.error
import urllib.request

url, engines, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline_s = time.monotonic() + seconds
state = "no answer"
while time.monotonic() < deadline_s:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            admitted = json.load(response)["pods"]["admitted"]
        state = f"{admitted} of {engines} engines take requests"
        if admitted >= engines:
            print(state)
            sys.exit(0)
    except (OSError, ValueError) as error:
        state = f"{url}/ready: {error}"
    time.sleep(1)
sys.exit(f"gave up after {seconds:g} s: {state}")
