"""The lighthouse: message in (server), decide (loop), message out (dispatch). No torch."""
