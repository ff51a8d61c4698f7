--- Where the first number came from that is none.
local arguments = require "tycho.arguments"
local take = require "tycho.profile.take"

--- Where the first NaN or infinity began: what ty.profile.blame returns. tostring() gives it as a sentence.
---@class Blame
---@field op string        whose output has it
---@field shapes string    of the op's inputs
---@field module? string   that ran the op
---@field backward boolean in computing gradients
---@field given boolean    an input of the op had it already: it is the caller's, or of what no op of this library made
local Blame = {}
Blame.__index = Blame
Blame.__name = "Blame"

function Blame:__tostring()
  local where = self.module and (" in %s"):format(self.module) or ""
  local when = self.backward and ", in the backward pass" or ""
  local how = self.given and "came in with its inputs" or "began there, with inputs that had none"
  return ("%s(%s)%s%s: the first %s %s"):format(self.op, self.shapes, where, when, self.what, how)
end

--- Runs fn() and returns where the first NaN came from, nil where there was none, and then what fn returned: the first
-- kernel whose output has one, in the forward or the backward pass, and the part of `model` that ran it. Every output
-- is looked through, so this is slow. options: model (a module), infinite (false; true: infinities count too, which
-- masks make on purpose).
---@param fn function
---@param options? { model?: Module, infinite?: boolean }
---@return Blame?
---@return any ...
return function(fn, options)
  local who = "profile.blame"
  arguments.expect(who, "fn", fn, "a function")
  local o = arguments.read(who, options, { model = arguments.none, infinite = false }, { model = "a module" })
  local run, results = take(fn, { model = o.model, most = 1, find = o.infinite and "infinite" or "nan" })
  local event = run.events[1]
  local found = event and event.bad and setmetatable({ op = event.op, shapes = event.shapes, module = event.module,
    backward = event.backward, given = event.given, what = o.infinite and "NaN or infinity" or "NaN" }, Blame) or nil
  return found, table.unpack(results, 1, results.n)
end
