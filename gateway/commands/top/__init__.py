"""`tidemill top`: figures of the dashboard in a terminal. `follow` reads them, `history` stores them, `view` draws."""
