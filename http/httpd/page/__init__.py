"""The web page at `/`: shell.html, style.css and the scripts, and the one document made of them."""
