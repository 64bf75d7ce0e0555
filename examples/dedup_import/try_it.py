"""Publishes bursts of the same work, and counts what was queued and what it came to."""

import time

from examples.dedup_import.app import import_feed, ping, refresh


def outcomes(results):
    return [result.get(timeout=120) for result in results]


feed = f"news-{time.time():.0f}"
burst = [import_feed.delay(feed) for _ in range(10)]
print(f"import: {len(burst)} requests, {sum(not one.duplicate for one in burst)} queued")
print(f"import: a duplicate knows whose it is: {burst[-1].holder}")
texts = outcomes(burst)
assert len(set(texts)) == 1, texts

give_up_at = time.monotonic() + 30
while (again := import_feed.delay(feed)).duplicate and time.monotonic() < give_up_at:
    time.sleep(0.1)
assert again.get(timeout=60) != texts[0]
print("import: once it is done, the next request is a new one")

burst = [refresh.delay(feed)]
while (second := refresh.delay(feed)).id == burst[0].id:
    time.sleep(0.05)  # until the first one runs
burst += [second, *(refresh.delay(feed) for _ in range(9))]
print(f"refresh: {len(burst)} requests, {len({one.id for one in burst})} tasks: one running, one waiting")
assert len(set(outcomes(burst))) == 2

burst = [ping.delay(feed) for _ in range(3)]
outcomes(burst)
burst.append(ping.delay(feed))
print(f"ping: {len(burst)} requests within the minute, {len({one.id for one in burst})} sent")
assert len({one.id for one in burst}) == 1
