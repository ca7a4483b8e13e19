"""Wait until a gateway has its engines, and each gateway answers at its admin port: URL ENGINES SECONDS ADMIN_URL.

While a rollout switches that port on, the name in ADMIN_URL also leads to old gateways without the port.
"""

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

url, engines, seconds, admin_url = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
admin = urlsplit(admin_url)
deadline_s = time.monotonic() + seconds
state = "no answer"
while time.monotonic() < deadline_s:
    asked = f"{url}/ready"
    try:
        with urllib.request.urlopen(asked, timeout=5) as response:
            admitted = json.load(response)["pods"]["admitted"]
        state = f"{admitted} of {engines} engines take requests"
        if admitted >= engines:
            asked = admin_url
            for address in sorted({str(info[4][0]) for info in socket.getaddrinfo(admin.hostname, admin.port)}):
                asked = f"http://{f'[{address}]' if ':' in address else address}:{admin.port}/health"
                urllib.request.urlopen(asked, timeout=5).close()
            print(state)
            sys.exit(0)
    except (OSError, ValueError) as error:
        state = f"{asked}: {error}"
    time.sleep(1)
sys.exit(f"gave up after {seconds:g} s: {state}")
