"""The parts of a supervisor: workers, relay, lighthouse, preemption, lease."""
