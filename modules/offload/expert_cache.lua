--- Which experts of a layer stay on the device: caches that give the same answers and evict by different rules.
local arguments = require "tycho.arguments"

local rules = { lru = true, lfu = true, score = true }

--- The experts of one layer that are on the device.
---@class ExpertCache
---@field rule string
---@field slots integer
---@field held table<integer, boolean>  by the expert's number from 1
local ExpertCache = {}
ExpertCache.__index = ExpertCache
ExpertCache.__name = "ExpertCache"

--- A cache of so many experts. rule: "lru" evicts what was used longest ago, "lfu" what was used least often, "score"
-- what has the least score, where after every step S = alpha * top(s) + (1 - alpha) * S, of the router's shares s,
-- those below the `top` largest taken as 0 (Zhong et al. 2025, "HybriMoE"). What the router wants much and has not
-- chosen yet so counts as well. At first the experts from 1 on are held. options: experts, slots, rule ("score"),
-- alpha (0.5), top (slots).
---@param options table
---@return ExpertCache
local function new(options)
  local who = "offload.expert_cache"
  arguments.expect(who, "options", options, "a table")
  local o = arguments.read(who, options, { experts = arguments.none, slots = arguments.none, rule = "score",
    alpha = 0.5, top = arguments.none }, { experts = "an integer >= 1", slots = "an integer >= 0", rule = "a string",
    alpha = "a number in [0, 1]", top = "an integer >= 1" })
  arguments.expect(who, "experts", o.experts, "an integer >= 1")
  arguments.expect(who, "slots", o.slots, "an integer >= 0")
  if not rules[o.rule] then
    arguments.fail('%s: rule: expected "lru", "lfu" or "score", got %s', who, arguments.describe(o.rule))
  end
  local self = setmetatable(o, ExpertCache)
  self.top = math.min(o.experts, o.top or math.max(1, o.slots))
  self.held, self.used, self.count, self.score, self.clock = {}, {}, {}, {}, 0
  for e = 1, o.experts do
    self.held[e] = e <= o.slots or nil
    self.used[e], self.count[e], self.score[e] = 0, 0, 0.0
  end
  return self
end

--- After a step: which experts it took (tokens by expert), and the router's shares.
---@param load integer[]
---@param score number[]
function ExpertCache:see(load, score)
  local who = "ExpertCache:see"
  for name, list in pairs { load = load, score = score } do
    if type(list) ~= "table" or #list ~= self.experts then
      arguments.fail("%s: %s: expected a list of %d numbers, got %s", who, name, self.experts, arguments.describe(list))
    end
    for _, x in ipairs(list) do arguments.expect(who, name, x, "a list of numbers or a number") end
  end
  self.clock = self.clock + 1
  local order = {}
  for e = 1, self.experts do
    order[e] = e
    if load[e] > 0 then self.used[e], self.count[e] = self.clock, self.count[e] + 1 end
  end
  table.sort(order, function(a, b)
    if score[a] ~= score[b] then return score[a] > score[b] end
    return a < b
  end)
  for place, e in ipairs(order) do
    self.score[e] = self.alpha * (place <= self.top and score[e] or 0) + (1 - self.alpha) * self.score[e]
  end
end

-- How much an expert is worth keeping.
local function worth(self, e)
  if self.rule == "lru" then return self.used[e] end
  if self.rule == "lfu" then return self.count[e] end
  return self.score[e]
end

--- Which expert would go for another: that worth least of those that `busy` does not have (of all where it has all);
-- nil where there is room, or no slots.
---@param busy? table<integer, boolean>
---@return integer?
function ExpertCache:least(busy)
  busy = arguments.expect("ExpertCache:least", "busy", busy, "a table or nil") or {}
  local count, least, any = 0, nil, nil
  for e = 1, self.experts do
    if self.held[e] then
      count = count + 1
      if not any or worth(self, e) < worth(self, any) then any = e end
      if not busy[e] and (not least or worth(self, e) < worth(self, least)) then least = e end
    end
  end
  return count >= self.slots and (least or any) or nil
end

--- Takes an expert in, for the one that least() says. Returns the number of the one that went, nil where there was
-- room.
---@param expert integer
---@param busy? table<integer, boolean>
---@return integer?
function ExpertCache:insert(expert, busy)
  local who = "ExpertCache:insert"
  arguments.expect(who, "expert", expert, "an integer >= 1")
  arguments.expect(who, "busy", busy, "a table or nil")
  if expert > self.experts then
    arguments.fail("%s: expert: expected at most %d, got %d", who, self.experts, expert)
  end
  if self.held[expert] or self.slots == 0 then return nil end
  local gone = self:least(busy)
  if gone then self.held[gone] = nil end
  self.held[expert] = true
  return gone
end

return new
