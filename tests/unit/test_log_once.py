"""What is told once, told by several threads at the same moment."""

import threading

from deepspeed.log import _Once


def test_threads_that_come_together_tell_it_once():
    told, meeting = [], threading.Barrier(8)
    once = _Once(told.append)

    def tell():
        for word in range(200):
            meeting.wait()
            once(word)

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == list(range(200))
    once.cache_clear()
    once(0)
    assert told[-1] == 0
