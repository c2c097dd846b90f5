"""What a package needs to add a technique to CRAFT: derive from ``Technique``, and name the class in an entry point.

.. code-block:: toml

    [project.entry-points."craft.techniques"]
    thermal = "my_package.thermal:Thermal"

Importing this loads no torch: the lighthouse imports techniques, too. ``docs/howto/techniques.md`` has a complete example.
"""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.decide.policies.policy import Policy
from craft.decide.techniques.technique import Hooks, Moment, Surroundings, Technique
from craft.protocol import actions, events
from craft.protocol.errors import ConfigError
from craft.protocol.values.config import says

__all__ = [
    "ConfigError",
    "Hooks",
    "JobState",
    "Moment",
    "Policy",
    "Surroundings",
    "Technique",
    "actions",
    "events",
    "says",
]
