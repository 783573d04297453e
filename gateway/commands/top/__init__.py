"""`tidemill top`: the page's figures in a terminal. `follow` reads a server, `history` keeps, `view` draws."""
