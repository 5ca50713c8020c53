"""How ranks wait: they sleep, wake early when there is news, and never burn a core."""

import os
import select
import subprocess
import sys
import time

import pytest
from launch import ROOT

from ddl.comm import doorbell, polling
from ddl.comm.doorbell import Doorbell, watching_descriptors
from ddl.errors import CommunicationError, DeadlineError

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs Linux's epoll")


@pytest.fixture
def news():
    """An epoll descriptor that watches a pipe, and the pipe's end that makes it ring."""
    before = watching_descriptors()
    reading, writing = os.pipe()
    watcher = select.epoll()
    watcher.register(reading, select.EPOLLIN)
    assert watching_descriptors() - before == {watcher.fileno()}
    yield watcher, writing
    watcher.close()
    os.close(reading)
    os.close(writing)


def seconds(action):
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def test_a_sleep_lasts_until_there_is_news(news):
    watcher, writing = news
    bell = Doorbell([watcher.fileno()])
    assert bell.connected
    assert seconds(lambda: bell.sleep(0.05)) >= 0.04
    os.write(writing, b"!")
    assert seconds(lambda: bell.sleep(5.0)) < 1.0


def test_without_a_descriptor_it_is_a_sleep():
    bell = Doorbell()
    assert not bell.connected
    assert seconds(lambda: bell.sleep(0.05)) >= 0.04


def test_who_watches_the_watcher_is_left_out(news):
    watcher, writing = news
    upper = select.epoll()
    upper.register(watcher.fileno(), select.EPOLLIN)
    bell = Doorbell([watcher.fileno(), upper.fileno()])
    os.write(writing, b"!")
    assert bell._descriptors == [watcher.fileno()]
    upper.close()


def test_news_that_nobody_takes_does_not_burn_a_core_for_ever(news, monkeypatch):
    watcher, writing = news
    monkeypatch.setattr(doorbell, "MOST_FALSE_ALARMS", 50)
    bell = Doorbell([watcher.fileno()])
    os.write(writing, b"!")
    for _ in range(40):
        bell.sleep(5.0)
    bell.answered()  # a message came: it was not in vain
    for _ in range(51):
        bell.sleep(5.0)
    assert not bell.connected
    assert seconds(lambda: bell.sleep(0.05)) >= 0.04


def test_a_closed_descriptor_is_forgotten(news):
    watcher, _ = news
    bell = Doorbell([watcher.fileno()])
    watcher.close()
    bell.sleep(5.0)
    assert not bell.connected


def test_waits_sleep_ever_longer_and_end_at_the_deadline():
    pauses = []
    with pytest.raises(DeadlineError, match=r"who waits: nothing within 0\.2 s"):
        polling.wait(
            lambda: None,
            "who waits",
            0.2,
            cancelled=lambda: False,
            longest_sleep=0.01,
            sleep=lambda pause: (pauses.append(pause), time.sleep(pause)),
        )
    assert pauses == sorted(pauses)
    assert pauses[0] == polling.FIRST_SLEEP and pauses[-1] == 0.01
    with pytest.raises(CommunicationError, match="who waits: cancelled"):
        polling.wait(lambda: None, "who waits", 9.0, cancelled=lambda: True)
    assert polling.wait(lambda: "it", "who waits", 9.0, cancelled=lambda: True) == "it"


@pytest.mark.mpi
def test_ranks_that_wait_leave_the_cores_to_others(mpirun, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import time, ddl\n"
        "from ddl.collectives import messages\n"
        "comm = ddl.init(timeout=60)\n"
        "messages.barrier(comm)\n"
        "if comm.rank == 0:\n"
        "    time.sleep(1.5)\n"
        "used, waited = time.process_time(), time.monotonic()\n"
        "messages.barrier(comm)\n"
        "used, waited = time.process_time() - used, time.monotonic() - waited\n"
        "shares = messages.gather_objects(comm, used / waited)\n"
        "if comm.rank == 0:\n"
        "    print(*shares[1:])\n"
    )
    done = mpirun(4, [str(script)])
    assert done.returncode == 0, done.stderr
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 3 and max(shares) < 0.2


def test_doorbells_need_no_mpi():
    code = "import sys, ddl.comm.doorbell; assert 'mpi4py' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
