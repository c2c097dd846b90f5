"""Each package in here maps the hooks of another framework to CRAFT. They do not import each other; nothing imports them."""
