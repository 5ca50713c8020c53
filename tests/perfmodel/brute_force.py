"""An iteration as a plain event simulation: no recursion of the papers, no graph, no clock of ours.

A queue of events, worked off in the order of time, moves gradients from the device that computes
to the selector and on to the network. Slow and obvious: what the schedules are tested against.
"""

import heapq
from itertools import combinations, count


class Server:
    """Serves one job at a time, first come, first served."""

    def __init__(self, simulation):
        self.simulation, self.busy, self.waiting = simulation, False, []

    def submit(self, seconds, done):
        self.waiting.append((seconds, done))
        self.serve()

    def serve(self):
        if not self.busy and self.waiting:
            self.busy = True
            seconds, done = self.waiting.pop(0)

            def finish():
                self.busy = False
                done()
                self.serve()

            self.simulation.later(seconds, finish)


class Simulation:
    """A clock and its events."""

    def __init__(self):
        self.now, self.events, self.order = 0.0, [], count()

    def later(self, seconds, what):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what))

    def run(self):
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            what()
        return self.now


def last_average(t_b, numels, buckets, communicate, select=None, where="worker", overlap=True):
    """Seconds from the start of the backward pass until all gradients are averaged.

    Args:
        t_b: seconds of each layer's backward pass, in the order of the forward pass.
        numels: sizes, likewise.
        buckets: groups of layers; launched in the order in which they become complete.
        communicate: seconds for so many elements.
        select: seconds to select from so many elements, if at all.
        where: in the "worker" that communicates, in a "thread", or where "compute" happens.
        overlap: whether anything is launched before the backward pass has ended.
    """
    simulation = Simulation()
    network, thread = Server(simulation), Server(simulation)
    bucket_of = {layer: tuple(bucket) for bucket in buckets for layer in bucket}
    missing = {tuple(bucket): len(bucket) for bucket in buckets}
    held_back = []
    averaged_at = []

    def averaged():
        averaged_at.append(simulation.now)

    def launch(bucket):
        numel = sum(numels[layer] for layer in bucket)
        t_c, t_s = communicate(numel), select(numel) if select else 0.0
        if where == "worker":
            network.submit(t_s + t_c, averaged)
        elif where == "thread":
            thread.submit(t_s, lambda: network.submit(t_c, averaged))
        else:
            network.submit(t_c, averaged)

    def backward(layer):
        """The gradient of a layer is there; go on to the one before."""
        bucket = bucket_of[layer]
        missing[bucket] -= 1
        pause = 0.0
        if not missing[bucket]:
            if not overlap:
                held_back.append(bucket)
            elif where == "compute" and select:
                pause = select(sum(numels[member] for member in bucket))
                simulation.later(pause, lambda: launch(bucket))
            else:
                launch(bucket)
        if layer:
            simulation.later(pause + t_b[layer - 1], lambda: backward(layer - 1))
        else:
            for bucket in held_back:
                launch(bucket)

    last = len(t_b) - 1
    simulation.later(t_b[last], lambda: backward(last))
    simulation.run()
    assert len(averaged_at) == len(buckets)
    return averaged_at[-1]


def all_plans(layers):
    """Every way to cut the layers into buckets of neighbours, in the order of launch."""
    for number in range(layers):
        for cuts in combinations(range(1, layers), number):
            bounds = [0, *cuts, layers]
            yield tuple(
                range(bounds[place], bounds[place + 1]) for place in reversed(range(len(cuts) + 1))
            )
