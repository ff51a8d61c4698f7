--- Delta-DiT (Chen et al. 2024, "Delta-DiT: A Training-Free Acceleration Method Tailored for Diffusion Transformers"):
-- of a range of blocks what they add is kept, not what they give, so that the input of the present step still goes
-- through. With F the features before a range and G those after it, a full step keeps G - F; in the steps until the
-- next full one the range is left out, and F + (G - F) goes on. The blocks at the front make outlines, those at the
-- rear details (section 3.2): early in sampling, where outlines are made, those at the rear are left out, and late in
-- sampling those at the front.
local arguments = require "tycho.arguments"
local blocks_of = require "tycho.diffusion.blocks"

local fail = arguments.fail
local WHO = "cache.delta"

-- The range that stands still: what runs it and keeps what it adds, and what adds that again. "features" keeps what
-- comes out instead, which the paper compares with.
local function keeping(reuse)
  return function(next, call, x, ...)
    local y, text = next(x, ...)
    call.memory:put("x", call.branches, reuse == "features" and y or y - x)
    -- A stream of text beside, which the last block of some networks does not give back.
    if text then call.memory:put("text", call.branches, reuse == "features" and text or text - (...)) end
    return y, text
  end
end

local function adding(reuse)
  return function(_, call, x, ...)
    local y, text = call.memory:get("x", call.branches), call.memory:get("text", call.branches)
    if reuse == "features" then return y, text end
    return x + y, text and (...) + text
  end
end

--- A part of a sampler for the blocks of a transformer (see diffusion.blocks), or for a network whose blocks take no
-- orders yet. options: cached (how many blocks stand still; all but one), every (2: every so many steps is a full one,
-- and the first), switch (0.5: the share of the steps that are early), early ("rear") and late ("front"): which blocks
-- stand still there, of "front", "rear" and "none"; reuse ("difference"; "features": what came out of the range stands
-- for it). A U-Net's connections join the path between its blocks, so it has no such ranges: it is refused.
---@param network Module|Blocks
---@param options? table
---@return table part
---@return Blocks blocks  whose remove() makes the network what it was
local function new(network, options)
  local given = type(network) == "table" and rawget(network, "names") ~= nil
  local blocks = given and network or blocks_of(network)
  local count = #blocks.names
  local function refuse(...)
    if not given then blocks:remove() end
    fail(...)
  end
  if not blocks.chained then
    refuse("%s: network: expected one whose blocks feed each other, got %s", WHO, arguments.describe(blocks.model))
  end
  local o = arguments.read(WHO, options, { cached = count - 1, every = 2, switch = 0.5, early = "rear",
    late = "front", reuse = "difference" }, { cached = "an integer >= 1", every = "an integer >= 1",
    switch = "a number in [0, 1]", early = '"front" or "none" or "rear"', late = '"front" or "none" or "rear"',
    reuse = '"difference" or "features"' })
  if o.cached > count then refuse("%s: cached: expected an integer in [1, %d], got %d", WHO, count, o.cached) end
  local ranges = { front = { 1, o.cached }, rear = { count - o.cached + 1, count } }
  local keep, add = keeping(o.reuse), adding(o.reuse)
  local part = blocks:part(function(call)
    local run = call.run
    local place = run.step <= o.switch * (#run.points - 1) and o.early or o.late
    if o.every == 1 or place == "none" then return nil end
    local first, last = table.unpack(ranges[place])
    -- What is kept is of the range that is left out next: at the change of stages a full step comes in between.
    local memory = call.memory
    local full = (run.step - 1) % o.every == 0 or memory.place ~= place
    memory.place = place
    return { replace = { { first, last, full and keep or add } } }
  end)
  return part, blocks
end

return new
