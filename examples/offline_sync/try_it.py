"""A phone, a laptop and somebody else's desk, with a worker in between. See the README."""

from __future__ import annotations

import time
import uuid

from app import Device, announce, create_owner, create_tables, purge


def main() -> None:
    create_tables()
    alice, bob = str(uuid.uuid4()), str(uuid.uuid4())
    create_owner(alice)
    create_owner(bob)
    phone, laptop, desk = Device(alice, "phone"), Device(alice, "laptop"), Device(bob, "desk")
    shopping, diary = str(uuid.uuid4()), str(uuid.uuid4())

    phone.edit(shopping, "milk")
    phone.edit(diary, "dear diary")
    phone.sync()
    laptop.sync()
    print("laptop has what the phone wrote:", sorted(laptop.notes.values()))

    phone.edit(shopping, "milk, eggs")
    time.sleep(0.01)  # what is edited within one millisecond is ordered by the devices' names
    laptop.edit(shopping, "milk, bread")  # later, and handed over first
    laptop.sync()
    phone.sync()
    print("the later edit wins on both:", phone.notes[shopping], "=", laptop.notes[shopping])

    announce.delay([bob, alice], "the server moves on Sunday").get(timeout=60)
    desk.sync()
    print("somebody else's device learns of an announcement:", list(desk.notes.values()))

    phone.edit(diary, None)
    phone.sync()
    print("deletions forgotten by the server:", purge.delay(0).get(timeout=60))
    laptop.sync()
    print("the laptop was away and had to start again:", laptop.resyncs == 1, diary not in laptop.notes)
    phone.sync()
    print("in sync:", laptop.notes == phone.notes)


if __name__ == "__main__":
    main()
