std = "lua54"
max_line_length = 120
exclude_files = { "build", "build.luarocks", "runs", ".git", "lua_modules" }
-- Methods and callbacks take the arguments of their kind whether they need them or not.
unused_args = false
files["tests/ops/*.lua"].max_line_length = 180 -- rows of cases read best one to a line
