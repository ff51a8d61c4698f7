--- Pictures of prompts as PNG files that say what they were made with: batch by batch, so that what is ready stays when
-- somebody presses Ctrl-C.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail
local M = {}

-- What stands in a line of parameters, as web interfaces write and read it; the rest under names of its own.
local function describe(job, o)
  local lines = { job.prompt }
  if job.negative ~= "" then lines[#lines + 1] = "Negative prompt: " .. job.negative end
  local facts = { "Steps: " .. o.steps, "Sampler: " .. o.sampler, ("CFG scale: %g"):format(o.guidance),
    "Seed: " .. job.seed, ("Size: %dx%d"):format(job.width, job.height) }
  if o.model ~= "" then facts[#facts + 1] = "Model: " .. o.model end
  if job.strength then facts[#facts + 1] = ("Denoising strength: %g"):format(job.strength) end
  lines[#lines + 1] = table.concat(facts, ", ")
  return { parameters = table.concat(lines, "\n"), prompt = job.prompt, negative = job.negative,
    seed = tostring(job.seed), steps = tostring(o.steps), sampler = o.sampler, Software = "tycho" }
end

local own = { model = "", sampler = "", batch = 4, each = 1, on_progress = arguments.none }

--- The prompts of a text file, one a line, in UTF-8 with or without a mark at its beginning; empty lines, and those
-- that begin with #, are left out.
---@param path string
---@return string[]
function M.prompts(path)
  local who = "gallery.prompts"
  expect(who, "path", path, "a string")
  local text = ty.io.read(path):gsub("^\xEF\xBB\xBF", "")
  local list, number = {}, 0
  for line in (text .. "\n"):gmatch "(.-)\r?\n" do
    number = number + 1
    local length, at = utf8.len(line)
    if not length then
      fail("%s: %s: line %d: expected UTF-8, got the byte 0x%02X at %d", who, path, number, line:byte(at), at)
    end
    line = line:match "^%s*(.-)%s*$"
    if line ~= "" and line:sub(1, 1) ~= "#" then list[#list + 1] = line end
  end
  if #list == 0 then fail("%s: %s: expected at least one prompt, got none", who, path) end
  return list
end

--- Paints prompts into folder/0001.png, 0002.png ... Each prompt is painted `each` times, with seeds that count up from
-- `seed`. Ctrl-C, or an on_step or on_progress that raises "interrupted", ends it after the pictures that are ready.
-- options: those of TextToImage:paint but noise, with batch 4, each (1), model and sampler (names, for the text in the
-- files), on_progress(steps done, steps in all, latents).
---@param painter TextToImage
---@param prompts string[]
---@param folder string
---@param options? table
---@return string[] files
---@return boolean interrupted
function M.paint(painter, prompts, folder, options)
  local who = "gallery.paint"
  expect(who, "painter", painter, "a table")
  expect(who, "painter.paint", painter.paint, "a function")
  expect(who, "prompts", prompts, "a list of strings")
  expect(who, "folder", folder, "a string")
  expect(who, "options", options, "a table or nil")
  local o, paint = {}, {}
  for key, value in pairs(options or {}) do
    if own[key] == nil then paint[key] = value end
    if own[key] ~= nil then o[key] = value end
  end
  if paint.noise then fail("%s: noise: expected none, for pictures have seeds, got a tensor", who) end
  o = arguments.read(who, o, own, { batch = "an integer >= 1", each = "an integer >= 1", on_progress = "a function" })
  o.steps, o.guidance = paint.steps or 20, type(paint.guidance) == "number" and paint.guidance or 4
  local seed = expect(who, "seed", paint.seed or 0, "an integer")
  local negative, jobs = expect(who, "negative", paint.negative or "", "a string"), {}
  for _, prompt in ipairs(prompts) do
    for _ = 1, o.each do
      jobs[#jobs + 1] = { prompt = prompt, negative = negative, seed = seed + #jobs, strength = paint.strength }
    end
  end
  if #jobs == 0 then fail("%s: prompts: expected at least one, got none", who) end
  ty.io.mkdir(folder)
  local files, done, told = {}, 0, paint.on_step
  local batches = (#jobs + o.batch - 1) // o.batch
  local all = batches * o.steps
  local function paint_batch(batch)
    local first = (batch - 1) * o.batch + 1
    local part = table.move(jobs, first, math.min(first + o.batch - 1, #jobs), 1, {})
    local texts, seeds = {}, {}
    for i, job in ipairs(part) do texts[i], seeds[i] = job.prompt, job.seed end
    paint.seed, paint.batch = seeds, #part
    paint.on_step = function(i, x, run)
      if o.on_progress then o.on_progress(math.min(all, done + i), all, x) end
      if told then return told(i, x, run) end
    end
    local pictures = painter:paint(texts, paint)
    done = done + o.steps
    for i, job in ipairs(part) do
      local picture = pictures:select(0, i - 1):to "cpu"
      job.height, job.width = picture.shape[2], picture.shape[3]
      local path = ("%s/%04d.png"):format(folder, first + i - 1)
      ty.io.save_image(path, picture, { text = describe(job, o) })
      files[#files + 1] = path
    end
  end
  for batch = 1, batches do
    local ok, problem = pcall(paint_batch, batch)
    if not ok then
      if not arguments.interrupted(problem) then error(problem, 0) end
      return files, true
    end
  end
  return files, false
end

return M
