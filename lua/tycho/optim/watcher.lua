--- Who wants to know that an optimizer has stepped: a recipe that prints its plan.
local M = {}
local watching

--- Calls fn(optimizer) after each step of any optimizer; nil: no longer.
---@param fn? fun(optimizer: table)
function M.watch(fn) watching = fn end

--- An optimizer has stepped.
---@param optimizer table
function M.stepped(optimizer) if watching then watching(optimizer) end end

return M
