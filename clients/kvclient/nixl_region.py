"""A region's NIXL agent: what makes the region's memory reachable for one-sided copies.

One agent for each region, made at its first transfer over nixl and kept as long as the region. So a
region's reachability can be ended for good without touching any other: that is what is left to do
when a server has died without a word, since its last copies may still be on their way.
"""

import os
import threading
from weakref import WeakKeyDictionary, finalize

from kvclient.region import Region, address_of
from kvserve.nixl_agent import NixlAgent


class RegionAgent:
    """`metadata` is what a server needs to reach the region."""

    def __init__(self, region: Region) -> None:
        """Takes tens of milliseconds; raises what `NixlAgent` and `register` do."""
        self.pid = os.getpid()
        self.address, self.size_bytes = address_of(region.view), region.size_bytes
        self._agent = NixlAgent()
        try:
            self._agent.register(self.address, self.size_bytes)
            self.metadata = self._agent.metadata()
        except BaseException:
            self._agent.close()
            raise

    @property
    def is_closed(self) -> bool:
        return self._agent.is_closed

    def poll(self) -> None:
        """Lets arrive what is on its way.

        Raises:
            ServerUnavailable: the agent was closed.
        """
        self._agent.poll()

    def close(self) -> None:
        """Nothing arrives any more."""
        self._agent.close()


_agents: "WeakKeyDictionary[Region, RegionAgent]" = WeakKeyDictionary()
_turn = threading.Lock()


def region_agent_blocking(region: Region) -> RegionAgent:
    """The region's agent, made if there is none that can be used."""
    with _turn:
        agent = _agents.get(region)
        if agent is None or agent.is_closed or agent.pid != os.getpid():
            agent = _agents[region] = RegionAgent(region)
            region.when_closed(agent.close)
            # At exit as well: agents that outlive the interpreter may take the process down.
            finalize(region, agent.close)
        return agent
