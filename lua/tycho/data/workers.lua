--- The worker threads of a DataLoader. Request k goes to worker k mod n, so answers arrive in the order of the
-- requests.
local ty = require "tycho"

local Pool = {}
Pool.__index = Pool

-- Runs in the worker: positions and a seed in, one batch out.
local function serve(dataset, collate)
  local batches = require "tycho.data.batches"
  return function(positions, seed) return batches.make(dataset, positions, seed, collate) end
end

local M = {}

--- Starts `count` threads, each with its own copy of the dataset.
function M.new(count, dataset, collate)
  local self = setmetatable({ threads = {}, sent = 0, received = 0 }, Pool)
  for i = 1, count do self.threads[i] = ty.thread.new(serve, dataset, collate or nil) end
  return self
end

function Pool:pending() return self.sent - self.received end

function Pool:send(...)
  self.threads[self.sent % #self.threads + 1]:send(...)
  self.sent = self.sent + 1
end

--- The next answer; an error in a worker is raised here.
function Pool:receive()
  local thread = self.threads[self.received % #self.threads + 1]
  self.received = self.received + 1
  return thread:receive()
end

function Pool:close()
  for _, thread in ipairs(self.threads) do thread:close() end
  self.threads = {}
end

return M
