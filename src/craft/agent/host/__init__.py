"""Parts of the supervisor: workers, relay, lighthouse, preemption, lease."""
