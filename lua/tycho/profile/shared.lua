--- There is one profile at a time. Who measures on the side gives way to a profile that a program asks for.
local M = {}

--- Called before a profile begins; nil: nobody measures on the side.
---@type fun()?
M.give_way = nil

return M
