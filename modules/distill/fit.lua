--- The loop of distillation: ty.train.fit with a frozen teacher and the student's moving average at hand in the loss.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local new_teacher = require "tycho.distill.teacher"

---@class DistillParts
---@field student Module
---@field teacher? Teacher   frozen; its evaluations are counted
---@field average? Module    the student's moving average, where the option `average` asks for one

--- Trains a student by any loss of itself, a frozen teacher and its own moving average. options: those of train.fit but
-- `backward`, with
--   loss     a function of { student, teacher, average } and a batch: the loss, optionally further numbers for the log
--   teacher  a module, which is frozen, or a Teacher; none where the student is its own
-- Parameters of the student that want no gradients stay as they are: an adapter alone is trained that way.
-- Returns the losses of all steps, the model with the averaged weights (without an average the student), and how many
-- samples went through the teacher.
---@param student Module
---@param loader DataLoader|fun(): any
---@param options table
---@return number[] losses
---@return Module averaged
---@return integer evaluations
local function fit(student, loader, options)
  local who = "distill.fit"
  arguments.expect(who, "student", student, "a module")
  arguments.expect(who, "options", options, "a table")
  arguments.expect(who, "options.loss", options.loss, "a function")
  local teacher = options.teacher and new_teacher(options.teacher) or nil
  if teacher and rawequal(teacher.model, student) then
    arguments.fail("%s: teacher: expected another module than the student, which it would freeze; a clone, say", who)
  end
  local before, rest = teacher and teacher.evaluations or 0, {}
  for key, value in pairs(options) do
    if key ~= "teacher" then rest[key] = value end
  end
  rest.title = rest.title or "distillation"
  local parts = { student = student, teacher = teacher }
  function rest.loss(_, batch, average)
    parts.average = average
    return options.loss(parts, batch)
  end
  local losses, averaged = ty.train.fit(student, loader, rest)
  student:eval()
  return losses, averaged:eval(), teacher and teacher.evaluations - before or 0
end

return fit
