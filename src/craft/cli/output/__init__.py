"""What commands print: display, tables, echo, errors."""
