"""One llama-server: what it says (`replies`), how we ask (`client`), and how we notice that it is another
process than a moment ago (`sentinel`, `watch`)."""
