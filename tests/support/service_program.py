"""A service that is killed: `service_program.py DATABASE SEED` takes reports from four threads
until then.

It prints "begun"; "kept KEY" after a report was acknowledged; "version N" when N was published.
"""

from __future__ import annotations

import sys
import threading
from itertools import count

from services import Clock, at_once, report

from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage


def main(place: str, seed: str) -> None:
    printing = threading.Lock()

    def say(text: str) -> None:
        with printing:
            print(text, flush=True)

    def talk(service: Service, thread: int) -> None:
        for number in count():
            key = f"{seed}.{thread}.{number}"
            slowdown = 1.1 + 0.1 * (number % 5)
            service.report("gpt", report(key, number % 3, slowdown, source=key)).result()
            say(f"kept {key}")

    with Storage(place) as storage, Service(storage, now_s=Clock(), run=at_once) as service:
        service.on_version = lambda _, version: say(f"version {version}")
        say("begun")
        threads = [threading.Thread(target=talk, args=(service, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
