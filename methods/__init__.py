"""Methods turn behaviour on loops into losses: one file a method, one file a reward, and the toy world of both."""
