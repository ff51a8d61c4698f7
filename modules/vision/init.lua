--- Classification of images and clips, figures of many labels, boxes, tracking and super-resolution: require
-- "tycho.vision".
local classify = require "tycho.vision.classify"
local distil = require "tycho.vision.distil"
local pages = require "tycho.vision.pages"
local precision = require "tycho.vision.precision"

return require "tycho.lazy" ({
  ResNet = require "tycho.models.resnet",
  fit = classify.fit,
  classifier_loss = classify.classifier_loss,
  predict = classify.predict,
  scores = classify.scores,
  accuracy = classify.accuracy,
  measure = classify.measure,
  fixmatch_loss = require "tycho.vision.fixmatch",
  random_shift = classify.random_shift,
  distil = distil.distil,
  distil_loss = distil.distil_loss,
  soft_loss = distil.soft_loss,
  feature_distances = distil.feature_distances,
  pages = pages,
  multigrid = require "tycho.vision.multigrid",
  sub_batch_norm = require "tycho.vision.sub_batch_norm",
  boxes = require "tycho.vision.boxes",
  fields = require "tycho.vision.fields",
  field_trials = require "tycho.vision.field_trials",
  track = require "tycho.vision.track",
  super_resolution = require "tycho.vision.super_resolution",
  mean_average_precision = precision.mean_average_precision,
  macro_f1 = precision.macro_f1,
  interval = precision.interval,
}, {}, "tycho.vision")
